"""`kvbridge demo`. Only `engines` imports torch and transformers: it runs in processes of its own."""
