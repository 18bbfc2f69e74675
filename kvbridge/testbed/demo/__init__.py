"""`kvbridge demo`: the command, the two engines that it runs, and the model alone that they are compared with.

Only the modules that end in `_process`, `model`, `generation`, `reference` and `watch` know torch and transformers: they run in
processes of their own.
"""
