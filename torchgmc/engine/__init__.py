"""The mathematics on bare tensors: search, solver, lasso, hashing, checks. Knows nothing of heads, files or other packages."""
