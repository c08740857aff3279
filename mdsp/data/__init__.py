"""Text corpora in, tokenised .bin/.idx datasets, sample order, micro-batches."""
