"""`kvbridge demo`: a real model over real daemons on this machine, compared logit by logit with the model alone.

Only `engines` and `reference` import torch and transformers: they run in processes of their own.
"""
