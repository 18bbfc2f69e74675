"""The memory that pages lie in: mappings, device allocations, registration, layouts."""
