use super::{Suite, debian_sources, installed};

#[test]
fn a_simulation_lists_new_packages_and_no_upgrades() {
    let simulation = "Inst libc6 (2.36-9 Debian:12 [amd64]) []\n\
                      Inst dpkg [1.21] (1.22 Debian:12 [amd64])\n\
                      Conf libc6 (2.36-9 Debian:12 [amd64])\n\
                      Inst xz-utils (5.4.1-1+b1 Debian:12 [amd64])\n";
    let found: Vec<_> = installed(simulation).collect();
    assert_eq!(found, [("libc6", "2.36-9"), ("xz-utils", "5.4.1-1+b1")]);
}

#[test]
fn sources_are_debians_main_components() {
    let target = |uri: &str, release: &str, component: &str, kind: &str| {
        let stem = uri.replace('/', "_");
        format!(
            "{uri}|{release}|{component}|amd64|{kind}|/l/{stem}_{release}_{component}_binary-amd64_Packages\n"
        )
    };
    let targets = [
        target("http://a/debian/", "bookworm", "main", "Packages"),
        target("http://a/debian/", "bookworm", "main", "Translations"),
        target("http://a/debian/", "bookworm", "contrib", "Packages"),
        target("http://a/debian/", "bookworm-updates", "main", "Packages"),
        target("http://a/debian/", "trixie", "main", "Packages"),
        target("http://s/", "bookworm-security", "main", "Packages"),
        target("http://other/", "bookworm", "main", "Packages"),
    ]
    .concat();
    let sources = |suite| {
        let is_debian = |stem: &str| !stem.contains("other") && !stem.ends_with("Packages");
        let sources = debian_sources(&targets, suite, is_debian);
        sources
            .lines()
            .map(|line| line.split(" http").nth(1).unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        sources(Suite::Trixie),
        [
            "://a/debian/ trixie main",
            "://a/debian/ trixie-updates main",
            "://s/ trixie-security main"
        ]
    );
    assert_eq!(
        sources(Suite::Bookworm),
        [
            "://a/debian/ bookworm main",
            "://a/debian/ bookworm-backports main",
            "://a/debian/ bookworm-updates main",
            "://s/ bookworm-security main",
        ]
    );
}
