"""The KV pool beyond the device: pages of global KV by key, in memory, on disk, elsewhere. No torch is in here.

interface   `PageStore`: what every tier can do
"""
