"""The model: its configuration, the parameter table derived from it, and the pipeline layers built from the table."""
