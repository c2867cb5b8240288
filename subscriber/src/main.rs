//! Bootstrap of the subscriber.

use clap::Parser;
use recant_schema::service::config::process_environment;
use recant_schema::service::shutdown::Shutdown;
use recant_schema::service::{EXIT_CONFIGURATION, telemetry, tls};
use recant_subscriber::cli::{Cli, Command};
use recant_subscriber::config::Config;
use recant_subscriber::{check, inspect, status, subscriber};
use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    tls::use_ring();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_CONFIGURATION) } else { ExitCode::SUCCESS };
        }
    };
    let environment = process_environment();
    let named = environment.iter().find(|(name, _)| name == "SUBSCRIBER_CONFIG").map(|(_, path)| PathBuf::from(path));
    let config = match Config::load(cli.config.or(named).as_deref(), &environment) {
        Ok(config) => config,
        Err(problems) => {
            for problem in problems.0 {
                eprintln!("subscriber: {problem}");
            }
            return ExitCode::from(EXIT_CONFIGURATION);
        }
    };
    telemetry::init(config.log_format);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("subscriber: could not start threads: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(perform(cli.command, config));
    // A blocking call to a broker that is away must not hold the exit up.
    runtime.shutdown_background();
    code
}

async fn perform(command: Command, config: Config) -> ExitCode {
    let done = match command {
        Command::Run => match Shutdown::on_signals() {
            Ok(shutdown) => subscriber::run(config, shutdown).await.map(|()| true),
            Err(error) => {
                eprintln!("subscriber: could not listen for signals: {error}");
                return ExitCode::FAILURE;
            }
        },
        Command::Check => Ok(check::check(&config).await),
        Command::Status { json } => status::status(&config, json).await.map(|()| true),
        Command::Inspect { key } => inspect::inspect(&config, &key).await,
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("subscriber: {}", error.line());
            ExitCode::FAILURE
        }
    }
}
