"""Prefill on one worker, decoding on another: what is handed over, by which way, and who does what.

parcel      the state of a computed prompt as bytes, every part of them verified before it is used
transport   how bytes get from one worker to the other: credit, deadlines, and one way within a process
mooncake    the way between machines: one-sided reads by Mooncake's transfer engine, out of an `arena`
"""
