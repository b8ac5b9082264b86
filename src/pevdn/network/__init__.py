"""The deployed runtime: each agent a process, on its own machine, over mutual TLS.

It runs the same agent program, schedule and release as the simulation.

    member         process entry: a party, or the world server
    party          one agent: the loop over protocol steps (play, update, evaluate)
    protocol       what parties send each other in a step: commit, reveal, share, open, compare
    secure_sum     additive shares and pairwise masks
    state          the agent, its counters, and what each step changes in them
    recovery       journal, snapshots and episodes on disk          catch_up   a missed step
    progress       public counters, and the step that follows       playing    episodes of a step
    compiled_agent the agent program, compiled for one agent
    group          send and collect (membership: views; mailbox: received messages)
    transport      authenticated delivery (schema, traffic, channel_options)
    environment    a remote world, or the agent's own body
    world_server   serves a simulated world (episodes: compiled, or in worker processes)
    roster, roster_file, keys    members, agreement, certificates
    randomness, streams          everything that is drawn
    status, lifecycle, readme, local
"""
