//! boto3 in a guest, against an S3 server.

use std::fs;
use std::net::TcpStream;
use std::process::Command;

use sha2::{Digest, Sha256};

use serde_json::json;

use super::site::{ADDRESS, Server, with_site};
use super::until;
use crate::secrets::made;

const PORT: u16 = 9000;
const MEBIBYTES: u64 = 64;

#[test]
#[ignore = "long: make test-full"]
fn boto3_stores_objects_and_gets_them_back() {
    with_site(|site| {
        let folder = site.world.file("store");
        fs::create_dir(&folder).unwrap();
        let certificates = made("FIRN_CERTIFICATES");
        let mut command = Command::new(made("FIRN_S3_SERVER"));
        command
            .args(["--access", "key", "--secret", "secret-of-the-key", "--quiet"])
            .args(["--port", &format!("{ADDRESS}:{PORT}")])
            .arg("--cert")
            .arg(certificates.join("server.pem"))
            .arg("--key")
            .arg(certificates.join("server.key"))
            .arg("posix")
            .arg(&folder);
        let _server = Server::start(&mut command);
        until("the S3 server listens", || TcpStream::connect((ADDRESS, PORT)).is_ok());
        let _guest = site.guest("first");
        let endpoint = format!("https://s3.test:{PORT}");
        let event = json!({"do": "store", "endpoint": endpoint, "mebibytes": MEBIBYTES});
        let seen = site.ask("first", &event);
        let stored = fs::read(folder.join("bucket/large")).unwrap();
        let digest: String =
            Sha256::digest(&stored).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            seen,
            json!({
                "small": true, "checksum": true, "large": true, "parts": MEBIBYTES / 8, "digest": digest
            })
        );
    });
}
