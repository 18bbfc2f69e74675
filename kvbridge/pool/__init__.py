"""Pages and the memory behind them: who has which page, where each lies, and shared mappings to hold them."""
