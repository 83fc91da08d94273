"""Two runs against each other: `compare` is where it begins. The rooms follow each other as the work does."""
