"""From page tables to operations: what one rank writes to another, and whether everything was written."""
