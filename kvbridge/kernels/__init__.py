"""Operations on memory: a compiled form where there is a device, and a reference that defines it."""
