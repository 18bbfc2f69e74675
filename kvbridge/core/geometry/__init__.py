"""What a model keeps for each request: components, encodings, presets, page counts, manifests."""
