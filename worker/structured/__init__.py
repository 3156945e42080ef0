"""Grammars of structured output, in the words of the library that follows them."""
