"""Sends requests of the OpenAI API to prefill and decode servers."""
