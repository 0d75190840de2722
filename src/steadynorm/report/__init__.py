"""Compare runs on one HTML page: `content` decides what is shown, `page` how it looks."""
