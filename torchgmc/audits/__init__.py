"""Is the promise kept? Audits, their intervals, comparisons, the worst groups, and the page that shows them."""
