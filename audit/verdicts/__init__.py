"""How one rule is judged and what is said about it. :mod:`audit.gate` is the door.

Pure: records in, records out.
"""
