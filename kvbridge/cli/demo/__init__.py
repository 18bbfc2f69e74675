"""`kvbridge demo`: the command, the two engines that it runs, and the model alone that they are compared with.

Only the modules that end in `_process`, `model` and `generation` know torch and transformers: they run in processes of their own.
"""
