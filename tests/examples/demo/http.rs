//! One GET to a process that the demo started.

use anyhow::Context as _;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Both services answer from memory; longer means that something hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A page of metrics is some 20 KB.
const LONGEST_ANSWER: u64 = 1 << 20;

/// Status code and body.
pub(crate) async fn get(address: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.take(LONGEST_ANSWER).read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    let answer = timeout(ANSWER_TIMEOUT, exchange).await.with_context(|| format!("http://{address}{path} does not answer"))??;
    let (head, body) = answer.split_once("\r\n\r\n").context("not an HTTP answer")?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no status in the HTTP answer")?;
    Ok((status, body.to_owned()))
}
