# Sourced: the stack in containers, by docker-compose.yml.

containers_start_s=180 # pulling the images is not in it; the health checks' own start periods are

compose() { docker compose --project-directory "$root" -f "$root/docker-compose.yml" "$@"; }

require_compose() {
  docker compose version >/dev/null 2>&1 || die "Docker answers but has no 'docker compose' (the compose v2 plugin); install it, or use STACK=native"
}

containers_running() { [[ -n $(compose ps -q 2>/dev/null) ]]; }

containers_up() {
  local log=$state/compose.log
  mkdir -p "$state"
  require_compose
  if ! containers_running; then
    require_free_port Postgres "$DEV_POSTGRES_PORT" DEV_POSTGRES_PORT
    require_free_port Kafka "$DEV_KAFKA_PORT" DEV_KAFKA_PORT
    require_free_port "Redis eu" "$DEV_REDIS_EU_PORT" DEV_REDIS_EU_PORT
    require_free_port "Redis us" "$DEV_REDIS_US_PORT" DEV_REDIS_US_PORT
  fi
  record_stack containers
  compose up --detach --quiet-pull --wait --wait-timeout "$containers_start_s" </dev/null >"$log" 2>&1 && return
  containers_explain "$log"
  die "the containers did not come up; see $log"
}

# The one line that names the cause, then the end of the logs of what is not healthy.
containers_explain() { # LOG
  local service
  tail -n 3 "$1" | cut -c1-300 | sed 's/^/  | /' >&2
  for service in $(compose ps --all --format '{{.Service}} {{.State}} {{.Health}}' 2>/dev/null | awk '$2 != "running" || $3 == "unhealthy" { print $1 }'); do
    complain "$service, the end of its log:"
    compose logs --no-color --no-log-prefix --tail 12 "$service" 2>&1 | cut -c1-300 | sed 's/^/  | /' >&2
  done
}

containers_down() { compose down </dev/null >/dev/null 2>&1 || die "'docker compose down' failed; run it by hand in $root to see why"; }
containers_wipe() { compose down --volumes </dev/null >/dev/null 2>&1 || die "'docker compose down --volumes' failed; run it by hand in $root to see why"; }

containers_status() {
  local server fine=0
  for server in postgres kafka redis-eu redis-us; do
    if answers "$server"; then
      say "  $server  127.0.0.1:$(port_of "$server")  up"
    else
      fine=1
      say "  $server  127.0.0.1:$(port_of "$server")  NOT ANSWERING: $(compose ps --all --format '{{.Status}}' "$server" 2>/dev/null || true); log: docker compose logs $server"
    fi
  done
  return "$fine"
}
