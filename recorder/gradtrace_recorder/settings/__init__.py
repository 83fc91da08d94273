"""What a person sets: variables, a settings file, and how their texts are read. Standard library only."""
