# Sourced: the native stack as a whole; each server's own ways are in postgres.sh, kafka.sh and redis.sh.

servers=(postgres kafka redis-eu redis-us)

port_of() { # SERVER
  case $1 in
    postgres) say "$DEV_POSTGRES_PORT" ;;
    kafka) say "$DEV_KAFKA_PORT" ;;
    redis-eu) say "$DEV_REDIS_EU_PORT" ;;
    redis-us) say "$DEV_REDIS_US_PORT" ;;
  esac
}

answers() { # SERVER
  case $1 in
    postgres) probe_postgres "$DEV_POSTGRES_PORT" ;;
    kafka) probe_kafka "$DEV_KAFKA_PORT" ;;
    redis-eu) probe_redis "$DEV_REDIS_EU_PORT" ;;
    redis-us) probe_redis "$DEV_REDIS_US_PORT" ;;
  esac
}

# A full disk otherwise shows as a server that dies somewhere in its first minute.
require_disk() {
  local free_mb needed_mb=${DEV_MIN_FREE_MB:-1024} # the jars, a cluster, its WAL (max_wal_size) and the first topics
  free_mb=$(df -Pm "$state" | awk 'NR == 2 { print $4 }')
  ((free_mb >= needed_mb)) || die "the disk of $state is full: $free_mb MB free, the stack needs $needed_mb (DEV_MIN_FREE_MB)"
}

require_writable() {
  local owner
  mkdir -p "$state/logs" 2>/dev/null || die "cannot write $state"
  [[ -w $state && -w $state/logs ]] && return
  owner=$(stat -c %U "$state")
  die "$state belongs to $owner; run as $owner, or 'make wipe' as $owner first"
}

require_linux() {
  [[ $(uname -s) == Linux ]] || die "the native stack needs Linux (/proc, setsid); start Docker and use STACK=containers"
}

# Everything is launched before anything is waited for, so that the stack takes as long as its slowest server.
native_up() {
  require_linux
  require_writable
  require_disk
  install_missing servers
  start_redis eu "$DEV_REDIS_EU_PORT" DEV_REDIS_EU_PORT
  start_redis us "$DEV_REDIS_US_PORT" DEV_REDIS_US_PORT
  record_stack native
  start_kafka
  start_postgres
  await_redis eu "$DEV_REDIS_EU_PORT"
  await_redis us "$DEV_REDIS_US_PORT"
  await_postgres
  await_kafka
}

# Something of it was started and not stopped; a server that has died since counts, so that its death gets told.
native_running() {
  local server
  for server in "${servers[@]}"; do ! was_started "$server" || return 0; done
  return 1
}

stop_deadline_s=30 # Kafka closes its logs, Postgres writes a checkpoint; then they are killed
native_down() {
  local server
  for server in redis-us redis-eu kafka; do signal_stop "$server" TERM; done
  signal_stop postgres INT # fast shutdown: sessions are ended; TERM would wait for them
  for server in "${servers[@]}"; do await_stop "$server" "$stop_deadline_s"; done
}

# One line each; false unless all answer.
native_status() {
  local server pid fine=0
  for server in "${servers[@]}"; do
    if pid=$(running_pid "$server"); then
      if answers "$server"; then
        say "  $server  127.0.0.1:$(port_of "$server")  up, pid $pid"
      else
        fine=1
        say "  $server  127.0.0.1:$(port_of "$server")  pid $pid runs but does not answer; log: $(log_of "$server")"
      fi
    elif was_started "$server"; then
      fine=1
      say "  $server  DEAD; 'make up' starts it again; log: $(log_of "$server")"
      show_log_tail "$server" 2>&1
    else
      fine=1
      say "  $server  not started"
    fi
  done
  return "$fine"
}

# Data, logs and pid files; Kafka's jars stay, they are no data.
native_wipe() {
  local elsewhere
  if [[ -L $state/postgres ]]; then
    elsewhere=$(readlink -f "$state/postgres")
    [[ $elsewhere != /var/tmp/recant-dev-* ]] || rm -rf "$elsewhere"
  fi
  rm -rf "$state/postgres" "$state/redis-eu" "$state/redis-us" "$state/kafka/data" "$state/kafka/server.properties" \
    "$state/logs" "$state/pids"
}
