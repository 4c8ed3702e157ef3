"""Statistics over probes: cells, tables, resampling, distances, domains, families of tests and sensitivity.

Pure: arrays in, records out. :mod:`audit.compare` and :mod:`audit.calibrate` are the doors.
"""
