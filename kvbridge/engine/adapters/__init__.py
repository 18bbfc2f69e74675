"""A real model as an engine: Hugging Face's DeepSeek-V4, whole and sparse. It needs the extra `transformers`."""
