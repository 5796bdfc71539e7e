"""KV transfer: blocks of a finished prompt move from a prefill worker into blocks a decode worker has reserved."""
