use super::{ImageBuild, script_arguments};

fn custom(packages: &[&str], requirements: Option<&str>) -> String {
    let image = ImageBuild::Custom {
        out: "./a.erofs".to_owned(),
        from: "science".to_owned(),
        packages: packages.iter().map(|&package| package.to_owned()).collect(),
        requirements: requirements.map(Into::into),
    };
    script_arguments(&image).join(" ")
}

#[test]
fn script_arguments_describe_the_image() {
    assert_eq!(script_arguments(&ImageBuild::Own("science".to_owned())), ["science"]);
    assert_eq!(custom(&[], None), "--out ./a.erofs --from science");
    let all = "--out ./a.erofs --from science --packages a,b,c --requirements r.txt";
    assert_eq!(custom(&["a", "b", "c"], Some("r.txt")), all);
}
