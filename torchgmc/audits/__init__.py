"""Is the promise kept? Audits, their intervals, comparisons, the groups that are worst off, and the page that shows them."""
