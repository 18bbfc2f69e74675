"""Operations on memory: a compiled form where there is a device, and a reference that defines it.

Owns: moving and reading bytes by address. Must not know: transfers, rooms, who owns the memory.
"""
