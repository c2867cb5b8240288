# Sourced: the two native Redis servers, one per region. No persistence: the cache is a copy, and tests start from nothing.

redis_start_s=10 # it answers within milliseconds

launch_redis() { # REGION PORT
  mkdir -p "$state/redis-$1"
  launch "redis-$1" redis-server --bind 127.0.0.1 --port "$2" --dir "$state/redis-$1" --save '' --appendonly no \
    --protected-mode yes --daemonize no
}

start_redis() { # REGION PORT VARIABLE
  note_death "redis-$1"
  is_running "redis-$1" && return
  require_free_port "Redis $1" "$2" "$3"
  launch_redis "$1" "$2"
}

await_redis() { # REGION PORT
  await_ready "redis-$1" "$redis_start_s" probe_redis "$2"
}
