"""How things are called and counted in a sentence. Pure: texts and numbers in, texts out; no table is known here."""
