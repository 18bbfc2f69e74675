"""The transport over mooncake-transfer-engine."""
