use super::*;
use crate::functions::testing::version;

#[test]
fn as_many_microvms_as_are_provisioned_are_not_spare() {
    let (mut instances, version) = (InstanceTable::default(), version());
    let revision = version.revision;
    let wanted = |count| Provisioned(HashMap::from([(revision, count)]));
    let ids = [(); 4].map(|()| instances.add(&version));
    let spare = |wanted: &Provisioned, instances: &InstanceTable, idle| {
        wanted.spare(revision, idle, instances)
    };
    assert_eq!(spare(&Provisioned::default(), &instances, 4), 4);
    // Those that start do not count: their start can fail.
    assert_eq!([0, 1, 3, 4].map(|count| spare(&wanted(count), &instances, 3)), [3, 2, 0, 0]);
    instances.busy(ids[0]);
    instances.ending(ids[1]);
    // One that is busy counts, and is not one of the idle ones.
    assert_eq!([0, 1, 3, 4].map(|count| spare(&wanted(count), &instances, 3)), [3, 3, 1, 0]);
    let mut provisioned = wanted(3);
    provisioned.forget(revision);
    assert_eq!(spare(&provisioned, &instances, 3), 3);
}
