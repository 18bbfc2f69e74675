"""The CUDA side of the kernels: the runtime's calls, programs compiled at run time, and their launches.

Owns: everything that touches a GPU without torch. Must not know: whose memory it is. Nothing here is imported by a
process that has no device; `runtime.reason_without_device` says whether there is one.
"""
