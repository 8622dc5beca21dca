"""Who owns which page and slot, in integers: reference counts, the prefix index, admission. No tensor is in here.

pages     `PagePool`: free, used and cached pages of global KV, and which key a published page answers to
prefix    `PrefixChain`: the keys of one sequence's full pages
slots     `SlotPool`: private state, one slot a sequence
manager   `KVManager`: what a scheduler asks of the three
"""
