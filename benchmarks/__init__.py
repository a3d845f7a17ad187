"""Speed as ratios, measured in one run: ours, the same maths by hand, and peers. Timings are never
asserted.
"""
