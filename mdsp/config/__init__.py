"""The one JSON file: DeepSpeed's keys at the top, mdsp's own under "mdsp"; typed, checked, without torch."""
