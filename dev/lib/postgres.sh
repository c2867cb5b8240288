# Sourced: the native PostgreSQL. It refuses to run as root, so root runs it as the distribution's user `postgres`.

postgres_data=$state/postgres
postgres_start_s=60 # crash recovery after kill -9 of a busy server takes seconds; a minute means something is wrong

# The newest installed server's folder of programs.
postgres_bin() {
  local found
  found=$(printf '%s\n' /usr/lib/postgresql/*/bin/postgres | sort -t/ -k5 -n | tail -1)
  [[ -x $found ]] || found=$(command -v postgres) || return 1
  dirname "$found"
}

as_postgres() {
  if [[ $EUID == 0 ]]; then
    (cd / && exec setpriv --reuid=postgres --regid=postgres --init-groups "$@") # unlike runuser it leaves no parent process in between
  else
    "$@"
  fi
}

# The user postgres must be able to reach the data; below a private home directory it cannot, so they move to /var/tmp.
place_postgres_data() {
  if [[ $EUID == 0 ]] && ! as_postgres test -x "$state"; then
    local elsewhere
    elsewhere=/var/tmp/recant-dev-$(say "$root" | cksum | cut -d' ' -f1)
    say "  user postgres cannot reach $state; its data go to $elsewhere"
    mkdir -p "$elsewhere"
    ln -sfn "$elsewhere" "$postgres_data"
    chown postgres: "$elsewhere"
    chmod 700 "$elsewhere"
  else
    mkdir -p "$postgres_data"
    chmod 700 "$postgres_data"
    [[ $EUID != 0 ]] || chown postgres: "$postgres_data"
  fi
}

postgres_query() { # DATABASE SQL
  PGPASSWORD=recant PGCONNECT_TIMEOUT=2 "$(postgres_bin)/psql" -qAtX -h 127.0.0.1 -p "$DEV_POSTGRES_PORT" -U recant -d "$1" -c "$2"
}

postgres_takes_queries() { postgres_query postgres 'select 1' >/dev/null 2>&1; }

initialise_postgres() {
  local data password
  data=$(readlink -f "$postgres_data")
  [[ ! -f $data/PG_VERSION ]] || return 0
  say '  making a new database cluster'
  # initdb reads the password from a file that it must be able to open as its own user.
  password=$(mktemp)
  say recant >"$password"
  [[ $EUID != 0 ]] || chown postgres: "$password"
  as_postgres "$(postgres_bin)/initdb" -D "$data" -U recant -A scram-sha-256 --pwfile="$password" -E UTF8 --locale=C.UTF-8 \
    --no-instructions >"$state/logs/initdb.log" 2>&1 || {
    rm -f "$password"
    tail -n 5 "$state/logs/initdb.log" | sed 's/^/  | /' >&2
    die "initdb failed; see $state/logs/initdb.log, then 'make wipe' and try again"
  }
  rm -f "$password"
}

check_postgres_version() {
  local made_by have
  made_by=$(cat "$postgres_data/PG_VERSION")
  have=$("$(postgres_bin)/postgres" --version | sed 's/[^0-9]*\([0-9]*\).*/\1/')
  [[ $made_by == "$have" ]] || die "the data in $postgres_data are of PostgreSQL $made_by, the server is $have; 'make wipe' deletes them"
}

launch_postgres() {
  local data bin
  data=$(readlink -f "$postgres_data") bin=$(postgres_bin)
  local command=("$bin/postgres" -D "$data" -p "$DEV_POSTGRES_PORT"
    -c listen_addresses=127.0.0.1
    -c unix_socket_directories=''     # loopback only; a socket's path would have to be short and reachable
    -c wal_level=logical              # the relay's tail
    -c track_commit_timestamp=on      # propagation time starts at the commit
    -c max_connections=300            # tests run in parallel, each with a relay and a database of its own
    -c max_wal_senders=40 -c max_replication_slots=40 # one tail per test that runs at a time
    -c shared_buffers=128MB
    -c max_wal_size=1GB
    -c log_line_prefix='%m [%p] %q%u@%d ')
  # fsync and synchronous_commit stay on: tests kill this kind of server and count what survived.
  if [[ $EUID == 0 ]]; then
    (cd / && launch postgres setpriv --reuid=postgres --regid=postgres --init-groups "${command[@]}")
  else
    launch postgres "${command[@]}"
  fi
}

start_postgres() {
  note_death postgres
  is_running postgres && return
  require_free_port Postgres "$DEV_POSTGRES_PORT" DEV_POSTGRES_PORT
  place_postgres_data
  initialise_postgres
  check_postgres_version
  wait_until 10 postgres_memory_is_free || die "processes of a killed Postgres still run on $postgres_data; end them and try again"
  forget_zombie
  launch_postgres
}

# A killed main process that its parent has not yet noticed (a zombie) still has its number, so a new one would take
# the old one's lock file for a living server's. Nothing runs on the data any more: postgres_memory_is_free saw to that.
forget_zombie() {
  local file=$postgres_data/postmaster.pid pid=''
  [[ -f $file ]] || return 0
  read -r pid <"$file" || true
  ! start_time "$pid" >/dev/null || return 0 # alive, whoever it is: Postgres itself decides
  rm -f "$file"
}

# After kill -9 of the main process its children need a moment to notice; until then a new one refuses to start.
postgres_memory_is_free() {
  local stat data
  data=$(readlink -f "$postgres_data")
  for stat in /proc/[0-9]*/cwd; do
    [[ $(readlink "$stat" 2>/dev/null) != "$data" ]] || return 1
  done
}

await_postgres() {
  await_ready postgres "$postgres_start_s" postgres_takes_queries
  [[ $(postgres_query postgres "select 1 from pg_database where datname = 'recant'") != 1 ]] || return 0
  local error
  error=$(postgres_query postgres 'create database recant' 2>&1) || die "database recant could not be made: ${error//$'\n'/; }"
}
