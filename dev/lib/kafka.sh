# Sourced: the native Kafka, one broker that is its own controller (KRaft), its jars from Maven Central by dev/kafka/pom.xml.

kafka_state=$state/kafka
kafka_start_s=90 # about 4 s on an idle machine; a machine that compiles at the same time may need ten times that
kafka_heap=512m

# The jars are kept as long as pom.xml is the one that they came by.
fetch_kafka() {
  local pom=$root/dev/kafka/pom.xml lib=$kafka_state/lib
  cmp -s "$pom" "$lib/pom.xml" && return
  say '  fetching Kafka from Maven Central (about 100 MB, once)'
  rm -rf "$lib" "$lib.new"
  mkdir -p "$lib.new"
  mvn -B -q -f "$pom" dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$lib.new" \
    </dev/null >"$state/logs/maven.log" 2>&1 || {
    grep ERROR "$state/logs/maven.log" | head -3 | cut -c1-300 | sed 's/^/  | /' >&2
    die "Maven could not fetch Kafka; see $state/logs/maven.log"
  }
  cp "$pom" "$lib.new/pom.xml"
  mv "$lib.new" "$lib"
}


write_kafka_config() {
  sed -e "s|@PORT@|$DEV_KAFKA_PORT|g" -e "s|@CONTROLLER_PORT@|$DEV_KAFKA_CONTROLLER_PORT|g" -e "s|@DATA@|$kafka_state/data|g" \
    "$root/dev/kafka/server.properties" >"$kafka_state/server.properties"
}

format_kafka() {
  [[ ! -f $kafka_state/data/meta.properties ]] || return 0
  say '  formatting Kafka storage'
  local id
  id=$(head -c 16 /dev/urandom | base64 | tr '+/' '-_' | cut -c1-22) # a Kafka UUID: 16 bytes, base64url, no padding
  [[ $id != -* ]] || id=A${id:1} # a leading dash would read as an option
  java -Xmx128m -cp "$kafka_state/lib/*" kafka.tools.StorageTool format -t "$id" -c "$kafka_state/server.properties" \
    </dev/null >"$state/logs/kafka-format.log" 2>&1 || {
    tail -n 5 "$state/logs/kafka-format.log" | sed 's/^/  | /' >&2
    die "Kafka's storage could not be formatted; see $state/logs/kafka-format.log, then 'make wipe' and try again"
  }
}

start_kafka() {
  note_death kafka
  is_running kafka && return
  require_free_port Kafka "$DEV_KAFKA_PORT" DEV_KAFKA_PORT
  require_free_port "Kafka's controller" "$DEV_KAFKA_CONTROLLER_PORT" DEV_KAFKA_CONTROLLER_PORT
  mkdir -p "$kafka_state/data"
  fetch_kafka
  write_kafka_config
  format_kafka
  launch kafka java "-Xms$kafka_heap" "-Xmx$kafka_heap" -XX:+UseG1GC -XX:MaxGCPauseMillis=20 -Djava.awt.headless=true \
    "-Dlog4j2.configurationFile=$root/dev/kafka/log4j2.properties" -cp "$kafka_state/lib/*" \
    kafka.Kafka "$kafka_state/server.properties"
}

await_kafka() { await_ready kafka "$kafka_start_s" probe_kafka "$DEV_KAFKA_PORT"; }
