"""The team as strangers: every agent a process of its own, on its own machine, over mutual TLS.

It runs the same `agent/` code as the simulation; what differs is who can read whose memory.

    roster      who is in the team, where, with which certificate, and what they have agreed on
    keys        certificates and private keys
    transport   who may talk, what may be said, and that it arrives once
    sums        Σ m_i on the wire: shares or pairwise masks
    randomness  everything that is drawn, from the operating system's generator
    journal     what a party has on disk, so that a kill loses nothing
    mind        what one agent computes
    party       one agent: Algorithm 1 as rounds that the whole team completes or none
    stage       the process that hosts a simulated world
"""
