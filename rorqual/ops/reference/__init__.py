"""The ops in plain torch: what the fast twins are compared with, and what serves where they cannot."""
