"""Damage and kills at random, for as long as they are asked for."""
