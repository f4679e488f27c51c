"""Reports for people: what the numbers of other modules look like on a page or in a terminal."""
