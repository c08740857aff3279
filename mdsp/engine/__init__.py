"""The model as a DeepSpeed PipelineModule, and the PipelineEngine subclass that trains it."""
