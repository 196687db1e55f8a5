use super::*;

#[test]
fn sections_are_tenants_with_quotas() {
    let text = "aws_access_key_id = A\naws_secret_access_key = a\n\
        [ shop ]\naws_access_key_id=B\naws_secret_access_key=b\n\
        firn_planners = firn, pass_shared\nfirn_functions = 5\nfirn_versions = 10\nfirn_code=1G\n\
        firn_snapshots = 20G\nfirn_provisioned = 4\n\
        [shop]\naws_access_key_id = C\naws_secret_access_key = c\n[idle]\nregion = x\n";
    let found = Credentials::parse(text).unwrap();
    let tenant = |key| found.key(key).unwrap().tenant.as_str();
    assert_eq!([tenant("A"), tenant("B"), tenant("C")], ["default", "shop", "shop"]);
    let quotas = Quotas {
        planners: Some(vec!["firn".to_owned(), "pass_shared".to_owned()]),
        functions: Some(5),
        versions: Some(10),
        code: Some(1 << 30),
        snapshots: Some(20 << 30),
        provisioned: Some(4),
    };
    assert_eq!(found.tenants(), &BTreeMap::from([("shop".to_owned(), quotas)]));
}

#[test]
fn quotas_that_cannot_be_read_are_errors() {
    for line in [
        "firn_version = 1",
        "firn_code = much",
        "firn_versions = -1",
        "firn_functions = many",
        "firn_planners = x",
    ] {
        let (number, reason) = Credentials::parse(&format!("[a]\n{line}\n")).unwrap_err();
        assert_eq!(number, 2);
        assert!(reason.starts_with(line.split(' ').next().unwrap()), "{reason}");
    }
}
