"""`kvbridge replay`: a request trace over real daemons, with engines that write and check every byte.

Only the modules that end in `_process` know torch: they run in processes of their own.
"""
