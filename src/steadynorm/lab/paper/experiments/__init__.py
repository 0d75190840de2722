"""The paper's figures and tables, and our own: one value each."""
