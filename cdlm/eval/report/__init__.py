"""From result rows to the paper's tables and figures, and to the honest frontier beside them."""
