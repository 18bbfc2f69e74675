"""The memory of a model for each request: components, encodings, presets, page counts, manifests."""
