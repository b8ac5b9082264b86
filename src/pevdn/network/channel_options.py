"""Options of gRPC servers and channels between members."""

_RECEIPT_LIMIT = 2**16  # bytes
_BOTH = (
    # Detect a dead peer within about 20 seconds. gRPC also pings to measure bandwidth, and while
    # such a ping is under way its timeout applies.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A compressed message could be small on the wire and huge in memory.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
)
SERVER = (
    *_BOTH,
    ("grpc.so_reuseport", 0),  # do not share a port with another process
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 256),
)
CLIENT = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # time limit of one attempt to connect
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.max_receive_message_length", _RECEIPT_LIMIT),
)
