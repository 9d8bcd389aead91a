"""The published files of each data set, converted to the compact layout."""
