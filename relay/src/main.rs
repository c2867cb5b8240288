//! Starts the relay: command line, runtime, exit code. What it does is in the library.

use clap::Parser;
use recant_relay::Error;
use recant_relay::cli::{Cli, Done, execute};
use recant_schema::service::{EXIT_CONFIGURATION, tls};
use std::process::ExitCode;

fn main() -> ExitCode {
    tls::use_ring();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // --help and --version come this way too, and are no failure.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_CONFIGURATION) } else { ExitCode::SUCCESS };
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("relay: could not start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(execute(cli));
    // Not dropped, which waits for blocking calls: a question to a broker that is away would hold up the end of the process.
    runtime.shutdown_background();
    match done {
        Ok(Done::Fine) => ExitCode::SUCCESS,
        Ok(Done::FoundTrouble) => ExitCode::FAILURE,
        Err(Error::Configuration(problems)) => {
            for problem in problems.0 {
                eprintln!("relay: {problem}");
            }
            ExitCode::from(EXIT_CONFIGURATION)
        }
        Err(error) => {
            eprintln!("relay: {}", error.line());
            ExitCode::FAILURE
        }
    }
}
